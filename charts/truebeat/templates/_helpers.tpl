{{/* Labels of every object; the two of the selector must never change. */}}
{{- define "truebeat.selector" -}}
app.kubernetes.io/name: truebeat
app.kubernetes.io/component: operator
{{- end }}
{{- define "truebeat.labels" -}}
{{ include "truebeat.selector" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | trunc 63 | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | quote }}
{{- end }}

{{/* One operator looks after a cluster, so its names are fixed: a second release with all of its parts collides at once, and says so. */}}
{{- define "truebeat.name" -}}truebeat-operator{{- end }}

{{- define "truebeat.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (.Chart.AppVersion | replace "+" "_") }}
{{- end -}}
{{- end }}

{{/* Where agents and engines are scraped. */}}
{{- define "truebeat.watched" -}}
{{- with .Values.watchNamespace -}}
matchNames: [{{ . | quote }}]
{{- else -}}
any: true
{{- end }}
{{- end }}

{{/* What every container of the release may do: nothing. */}}
{{- define "truebeat.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
{{- define "truebeat.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
seccompProfile:
  type: RuntimeDefault
{{- end }}
